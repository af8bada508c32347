"""`ddpjob convert`: the values of a shell's variables, and words that only a shell expands."""

import pytest
from conversions import converted, converted_script

from ddpjob.convert.bash import bash_syntax
from ddpjob.core.api.readers import SpecError


def shell(text):
    """Return the variables, the arguments and the comments of a text of `bash -c`."""
    spec, comments = converted("bash", "-c", text)
    env = {one["name"]: one["value"] for one in spec.get("env", ())}
    return env, spec["args"], comments


# Additions


@pytest.mark.parametrize(
    ("lines", "args"),
    [
        ("ARGS='--a 1'; ARGS+=' --b 2'; torchrun a.py $ARGS", ["--a", "1", "--b", "2"]),
        ("A=1; A+=2; A+=3; torchrun a.py $A", ["123"]),
        ("A=b; B=c; A+=$B; torchrun a.py $A", ["bc"]),
        ("export A=1; A+=2; torchrun a.py $A", ["$(A)"]),
        ("ARGS='--a 1'; ARGS=\"$ARGS --b 2\"; torchrun a.py $ARGS", ["--a", "1", "--b", "2"]),
        ("A=$(x):1; A+=/b; torchrun a.py $A", ["$(x):1/b"]),
    ],
)
def test_an_addition_follows_the_value_before(lines, args):
    _, found, _ = shell(lines)
    assert found == ["a.py", *args]


def test_an_addition_to_an_exported_variable_is_exported():
    env, _, _ = shell("export A=1; A+=2; torchrun a.py")
    assert env == {"A": "12"}


def test_an_addition_to_an_unknown_value_is_unknown():
    _, args, comments = shell("A=$(x); A+=' --b 2'; torchrun a.py $A")
    assert args == ["a.py", "$A"]
    assert "\"A+=' --b 2'\": because a variable in it has no known value" in comments
    assert "A in args: nothing expands it" in comments


def test_a_setup_has_the_values_before_an_addition():
    spec, _ = converted("bash", "-c", "A=b; A+=c; make $A; torchrun a.py")
    assert spec["setup"] == "bash -ec 'A=b\nA+=c\nmake $A'"
    spec, _ = converted("bash", "-c", "A=b; A=$A/c; make $A; torchrun a.py")
    assert spec["setup"] == "A=b\nA=$A/c\nmake $A"


@pytest.mark.parametrize(
    ("text", "found"),
    [("A+=b", "A+="), ("x; export A+=b", "A+="), ("x.py +a=b a+=b", ""), ("A=b", "")],
)
def test_an_addition_is_syntax_of_bash(text, found):
    assert bash_syntax(text) == found


# Unknown values


@pytest.mark.parametrize(
    "value", ["$1", "${1}", "${C##*/}", "${C^^}", "$$", "$?", "${#C}", "${C:+x}", "$@", "${C/a/b}"]
)
def test_what_only_a_shell_knows_is_no_literal_value(value):
    env, args, comments = shell(f"export A={value}; torchrun a.py --a $A")
    assert env == {}
    assert args == ["a.py", "--a", "$A"]
    assert "only a shell knows the value; instead: set A in spec.env" in comments
    assert "A in args: nothing expands it" in comments


def test_a_command_in_an_array_is_not_taken_for_a_variable():
    _, args, comments = shell("A=(--a $(date)); torchrun a.py ${A[@]}")
    assert args == ["a.py", "--a", "$(date)"]
    assert "write $(date); if date is a command, write its output" in comments
    *_, comments = shell("torchrun a.py $lr")
    assert (
        "lr in args: nothing expands it; instead: set lr in spec.env and write $(lr)\n" in comments
    )


@pytest.mark.parametrize("word", ["${A:+--a $A}", "${L//,/ }", "${B:+--b ${B}}"])
def test_an_expansion_with_a_space_is_one_word(word):
    _, args, comments = shell(f"A=1; torchrun a.py {word} --z")
    assert args == ["a.py", word.replace("$A", "1"), "--z"]
    assert "no shell reads it" in comments


def test_a_default_is_not_taken_for_an_unknown_value():
    _, args, _ = shell("A=$1; torchrun a.py ${A:-5} ${B:-6} ${C:=7}")
    assert args == ["a.py", "${A:-5}", "6", "7"]


def test_an_unknown_value_replaces_a_known_one():
    env, args, _ = shell("export A=1; A=$(x); torchrun a.py $A")
    assert (env, args) == ({}, ["a.py", "$A"])


def test_the_number_of_the_shell_in_an_argument_is_noted():
    _, _, comments = shell("torchrun a.py --log /tmp/$$")
    assert "/tmp/$$ in args: no shell reads it" in comments


# Exports


@pytest.mark.parametrize(
    ("lines", "env"),
    [
        ("export A=1; A=2", {"A": "2"}),
        ("export A; A=5", {"A": "5"}),
        ("A=4; export A; A=5", {"A": "5"}),
        ("set -a; A=1; set +a; B=1", {"A": "1"}),
        ("set -o allexport; A=1", {"A": "1"}),
        ("export A=1 B=2; unset A", {"B": "2"}),
        ("export A=1; unset A; A=2", {}),
        ("A=1", {}),
    ],
)
def test_a_variable_once_exported_stays_so(lines, env):
    assert shell(f"{lines}; torchrun a.py")[0] == env


def test_an_assignment_changes_a_variable_of_the_manifest():
    text = "A=2; unset B; torchrun a.py"
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "x"}]
    spec, comments = converted("sh", "-c", text, env=env)
    assert spec["env"] == [{"name": "A", "value": "2"}]
    assert 'B: "x": because it is unset there' in comments


def test_set_minus_a_is_no_dropped_line():
    _, _, comments = shell("set -a; A=1; torchrun a.py")
    assert "set -a" not in comments


# Words


@pytest.mark.parametrize(
    ("word", "arg"),
    [
        (r'"\${now:%Y}"', "${now:%Y}"),
        (r'"\$X"', "$X"),
        (r"\$X", "$X"),
        ("'$X'", "$X"),
        ("'${now:%Y}'", "${now:%Y}"),
        ("'$(date)'", "$$(date)"),
        ("'$$'", "$$$$"),
        (r'"\`x\`"', "`x`"),
        ("'<a>'", "<a>"),
        ('"*.txt"', "*.txt"),
        ("'{\"a\": [1, 2]}'", '{"a": [1, 2]}'),
        ('"~/x"', "~/x"),
        ('"$((2 * 3))"', "6"),
    ],
)
def test_a_quoted_character_is_literal(word, arg):
    env, args, comments = shell(f'X=1; export A={word}; B={word}; torchrun a.py {word} "$B"')
    assert args == ["a.py", arg, arg]
    assert env == {"A": arg}
    assert "in args" not in comments
    assert "dropped: " not in comments


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("~/x", "~/x in args: only a shell expands ~; instead: write the path"),
        ("--dir=~/x", "--dir=~/x in args: only a shell expands ~"),
        ("/data/*.tar", "/data/*.tar in args: no shell reads it; instead: write its value"),
        ("s-{0..3}.tar", "s-{0..3}.tar in args: no shell reads it"),
        ("{a,b}", "{a,b} in args: no shell reads it"),
    ],
)
def test_a_word_that_only_a_shell_replaces_is_noted(word, sentence):
    _, args, comments = shell(f"torchrun a.py {word}")
    assert args == ["a.py", word]
    assert sentence in comments
    spec, comments = converted("torchrun", "a.py", word)
    assert spec["args"] == ["a.py", word]
    assert "in args" not in comments


def test_a_home_folder_in_a_value_is_noted():
    env, _, comments = shell("export D=~/x; torchrun a.py --d $D")
    assert env == {"D": "~/x"}
    assert "D: only a shell expands ~; instead: write the path" in comments


def test_a_text_of_a_shell_in_quotes_is_read_as_one():
    lines = ("export A='x y'", r"""srun bash -c 'torchrun a.py "$A" \$B' """)
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["a.py", "x y", "$B"]


@pytest.mark.parametrize(
    "redirection",
    ["<<< 'x y'", ">& log", ">| log", "<> f", "< f", "2>&1", "> >(tee -a log | cat) 2>&1"],
)
def test_a_redirection_is_dropped_with_its_word(redirection):
    spec, _ = converted_script(f"srun python train.py {redirection}")
    assert spec["args"] == ["train.py"]


def test_a_value_before_a_block_is_noted_where_it_is_used():
    lines = ("ARGS='--a 1'", "[ $D = 1 ] && ARGS+=' --b'", "srun torchrun a.py $ARGS")
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py", "--a", "1"]
    assert 'ARGS in args: a block may change it; before, it is "--a 1", as in the tr' in comments
    _, comments = converted_script("I=0", "while x; do I=1; done", "srun torchrun a.py")
    assert "a block may change it" not in comments


def test_an_error_has_the_characters_themselves():
    with pytest.raises(SpecError, match=r'begins with "\$x"'):
        converted_script(r"srun '$x' torchrun a.py")
    with pytest.raises(SpecError, match=r'"bash \$x.sh torchrun" runs a script'):
        shell("bash '$x.sh' torchrun")


def test_a_flag_of_torchrun_with_a_value_of_a_shell_is_dropped():
    spec, comments = converted_script("srun torchrun --role $(hostname): --start-method fork a.py")
    assert spec["torchrun"] == {"args": ["--start-method", "fork"]}
    assert '--role: "$(hostname):": because its value is not known' in comments


@pytest.mark.parametrize(
    ("word", "args"),
    [
        ('"${B[*]}"', ["--name a b -x"]),
        ('"${B[@]}"', ["--name", "a b", "-x"]),
        ("${B[*]}", ["--name", "a", "b", "-x"]),
        ("${B[@]}", ["--name", "a", "b", "-x"]),
        ('"p${B[@]}q"', ["p--name", "a b", "-xq"]),
        ('"${C[@]}"', ["1", "--name", "a b", "-x", "2 3"]),
        ('"${E[@]}"', []),
        ('"${F[@]}"', [""]),
        ('"${X:-"/o/${Z:-"me"}"}"', ["/o/me"]),
        ('"${X:-"${Y}/a b"}"', ["/y/a b"]),
        ('"${X:-"a;b"}"', ["a;b"]),
        ('"${B[*]} y"', ["--name a b -x y"]),
        ('"y ${B[*]}" z', ["y --name a b -x", "z"]),
        ('"${X:-"a b"}"', ["a b"]),
        ("\"${X:-'a'}\"", ["'a'"]),
        ('"pre${X:="a b"}post"', ["prea bpost"]),
        ('${X:-"a b"}', ["a b"]),
        ("${X:-'a b'}", ["a b"]),
        ("$'a\\tb'", ["a\tb"]),
        (r"$'it\'s \\e \d \e' c", ["it's \\e \\d \x1b", "c"]),
        ("\"$'x'\"", ["$'x'"]),
        ("$'\\x41\\u00e9 é $Y'", ["Aé é $Y"]),
        (r"$'\x9|\u41\x4' $Y$'z'", ["\t|A\x04", "/yz"]),
        (r"$'\xc3\xa9\101\?\cA' $'a\0b'", ["éA?\x01", "a"]),
    ],
)
def test_quotes_keep_the_words_of_an_array_and_of_a_default_together(word, args):
    lines = ('B=(--name "a b" -x)', 'C=(1 "${B[@]}")', 'C+=("2 3")', "E=()", 'F=("")', "Y=/y")
    _, found, _ = shell("\n".join([*lines, f"torchrun a.py {word}"]))
    assert found == ["a.py", *args]


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("'lr=$(A)'", ["lr=5"]),
        ('"$(A)" $(A)', ["5", "5"]),
        # The text itself. No variable of the pods has the first name.
        ("'$(B)'", ["$$(B)"]),
        ("'$$(A)'", ["$$(A)"]),
    ],
)
def test_a_reference_of_kubernetes_is_expanded_before_the_shell(text, args):
    env = [{"name": "A", "value": "5"}]
    spec, _ = converted("bash", "-c", f"pip install x==$(A)\ntorchrun a.py {text}", env=env)
    assert spec["setup"] == "pip install x==5"
    assert spec["args"] == ["a.py", *args]


@pytest.mark.parametrize(
    "line",
    ["((N=N*8))", "((N++))", "let N*=4", 'read N <<< "7"', 'printf -v N "%03d" 5', "((++N, N*=2))"],
)
def test_a_value_that_a_calculation_changes_is_not_known(line):
    spec, comments = converted_script("N=1", line, "srun torchrun a.py --n $N")
    assert spec["args"] == ["a.py", "--n", "$N"]
    assert 'N in args: a block may change it; before, it is "1"' in comments


def test_an_element_that_is_set_changes_its_array():
    lines = ("A=(--lr 1)", "A[1]=5", 'srun torchrun a.py "${A[@]}"')
    _, comments = converted_script(*lines)
    assert "line 3 A: the block may change it; the training has the elements before" in comments


@pytest.mark.parametrize("quoted", ["$(grep -c ')' hosts)", "$(cut -d '(' -f 1 hosts)"])
def test_a_parenthesis_in_quotes_ends_no_substitution(quoted):
    lines = (f"N={quoted}", "export A=1", "# 1) train", "srun torchrun a.py")
    spec, _ = converted_script(*lines)
    assert spec["env"] == [{"name": "A", "value": "1"}]


@pytest.mark.parametrize("word", ["$CMD", "$ONE", '"$CMD"', "'torchrun a.py --b \"1 2\"'"])
def test_the_text_of_eval_is_the_training(word):
    lines = ("CMD='torchrun a.py --b \"1 2\"'", "ONE=\"torchrun a.py --b '1 2'\"", f"eval {word}")
    _, args, _ = shell("\n".join(lines))
    assert args == ["a.py", "--b", "1 2"]


def test_a_space_after_a_backslash_ends_the_command_and_is_an_error():
    with pytest.raises(SpecError, match="line 2: a space after the backslash"):
        converted_script("srun torchrun \\ ", "  a.py", "python other.py")


@pytest.mark.parametrize(
    ("line", "args", "remark"),
    [
        ("eval $CMD", ["a.py", "--n", "4"], '"tee log"'),
        ('eval "$CMD"', ["a.py", "--n", "4"], '"tee log"'),
        ('eval "cd /x && torchrun a.py"', ["a.py"], ""),
        ("time eval torchrun a.py", ["a.py"], ""),
        ("X=1 time eval $QUOTED", ["a.py", "b c"], ""),
        ('eval "$(conda hook)"; torchrun a.py', ["a.py"], ""),
    ],
)
def test_eval_reads_its_words_as_a_shell_does(line, args, remark):
    lines = (
        "N=4",
        "CMD='torchrun a.py --n $N 2>&1 | tee log'",
        "QUOTED='torchrun a.py \"b c\"'",
        line,
    )
    _, found, comments = shell("\n".join(lines))
    assert found == args
    assert remark in comments


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('export X="${X:-"/d"}"', "/d"),
        ('export X=${X:-"/d"}', "/d"),
        ("export X=${X:-'/d e'}", "/d e"),
        ("export X=\"${X:-'/d'}\"", "'/d'"),
        ("export X=$'a\\nb'", "a\nb"),
        ("export X=${X:-\"${Z:-'a b'}\"}", "'a b'"),
        ('A=(b "c d"); export X="${A[*]}"', "b c d"),
        ('A=(b "c d"); export X="<${A[@]}>"', "<b c d>"),
    ],
)
def test_the_value_of_an_export_has_no_quotes_of_the_shell(line, value):
    env, _, _ = shell(f"{line}; torchrun a.py")
    assert env == {"X": value}


def test_a_variable_of_torchrun_has_its_value_in_the_script():
    spec, _ = converted_script("WORLD_SIZE=8", "srun torchrun --nproc_per_node=$WORLD_SIZE a.py")
    assert spec["nprocPerNode"] == 8


def test_a_backslash_at_the_end_of_a_script_has_no_effect():
    _, args, _ = shell("torchrun a.py --x \\")
    assert args == ["a.py", "--x"]


@pytest.mark.parametrize(
    "lines",
    [
        ("CMD='torchrun a.py'", 'CMD="$CMD --x 1"', "srun $CMD"),
        ("CMD='torchrun a.py'", 'CMD="$CMD --x 1"', "eval $CMD"),
        ("CMD=(torchrun)", "CMD+=(a.py)", 'CMD=("${CMD[@]}" --x 1)', 'srun "${CMD[@]}"'),
    ],
)
def test_a_command_of_several_assignments_is_the_training(lines):
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["a.py", "--x", "1"]


def test_a_command_that_a_block_may_change_is_that_before_it():
    lines = ("CMD='torchrun a.py'", '[ -n "$D" ] && CMD="$CMD --debug"', "srun $CMD")
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py"]
    assert 'a block may change it; before, it is "torchrun a.py", as in the training' in comments


@pytest.mark.parametrize(
    "step", ['ARGS="$ARGS --c 3"', 'ARGS+=" --c 3"', 'ARGS="${ARGS} --c"; ARGS+=" 3"']
)
def test_arguments_built_up_after_a_block_have_all_other_steps(step):
    lines = ("ARGS='--a 1'", 'if x; then ARGS="$ARGS --b"; fi', step, "srun torchrun a.py $ARGS")
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py", "--a", "1", "--c", "3"]
    assert 'a block may change it; before, it is "--a 1 --c 3", as in the training' in comments


def test_a_number_that_a_block_may_change_is_not_taken_from_before_it():
    lines = ("N=1", "if x; then N=8; fi", "srun torchrun --nproc-per-node=$N a.py")
    spec, comments = converted_script(*lines)
    assert "nprocPerNode" not in spec
    assert '--nproc-per-node: "$N"' in comments


@pytest.mark.parametrize("block", ["if x; then H+=(b); fi"])
def test_an_array_that_the_training_does_not_use_has_no_note_on_the_training(block):
    assert "the training has" not in converted_script("H=(a)", block, "srun torchrun a.py")[1]


def test_a_path_of_a_container_is_no_variable_of_the_pods():
    spec, comments = converted_script("export SINGULARITYENV_PREPEND_PATH=/x", "srun torchrun a.py")
    assert "env" not in spec
    assert "because Singularity adds it to PATH in the container" in comments


@pytest.mark.parametrize(
    ("value", "arg"),
    [
        ("${L%% #*}", "${L%% #*}"),
        ("${L//,/;}", "${L//,/;}"),
        ('"${L//;/,}"', "${L//;/,}"),
        ("${L:-no; yes}", "no;"),
        ('"${L:-no; yes}"', "no; yes"),
        ('"${L:-don\'t # stop}"', "don't # stop"),
    ],
)
def test_an_expansion_ends_at_its_brace(value, arg):
    spec, _ = converted_script(f"A={value}", f"srun torchrun a.py {value} # end")
    assert spec["args"][:2] == ["a.py", arg]


def test_a_command_in_a_variable_of_the_pod_is_the_training():
    env = [{"name": "CMD", "value": "torchrun a.py"}]
    spec, _ = converted("bash", "-c", "eval $CMD --x 1", env=env)
    assert spec["args"] == ["a.py", "--x", "1"]


@pytest.mark.parametrize(
    "block",
    [
        "if a; then ARGS+=(--y); fi",
        "if a; then ARGS=(--y); fi",
        "while read -ra ARGS; do a; done",
    ],
)
def test_an_array_that_a_block_may_change_has_the_elements_before(block):
    lines = ("ARGS=(--x 1)", block, "ARGS+=(--z)", 'srun torchrun a.py "${ARGS[@]}"')
    spec, comments = converted_script(*lines)
    assert spec["args"] == ["a.py", "--x", "1", "--z"]
    assert "line 3 ARGS: the block may change it; the training has the elements before" in comments


def test_a_path_that_grows_in_many_lines_is_read():
    lines = [f"export PATH=/opt/{number}/bin:$PATH" for number in range(40)]
    spec, _ = converted_script(*lines, "srun torchrun a.py")
    assert spec["args"] == ["a.py"]


def test_the_elements_of_an_array_have_the_values_of_its_line():
    lines = ("A='--a 1'", "LR=1", "ARGS=($A --lr $LR)", "LR=2", 'srun torchrun x.py "${ARGS[@]}"')
    spec, _ = converted_script(*lines)
    assert spec["args"] == ["x.py", "--a", "1", "--lr", "1"]


@pytest.mark.parametrize("line", ['K=${J%"}"}', 'K="${J%"}"}"', 'K="${J%%\\{*}"', "K=${#J}"])
def test_braces_of_an_expansion_do_not_hide_the_training(line):
    spec, _ = converted_script(line, "srun torchrun a.py", 'L="${J##*\\}}"')
    assert spec["args"] == ["a.py"]


def test_many_open_braces_are_no_endless_search():
    spec, _ = converted_script('A="' + "${X" * 2000 + '"', "srun torchrun a.py")
    assert spec["args"] == ["a.py"]
