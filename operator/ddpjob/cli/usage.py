"""Format the help and the errors of a command."""

from typing import Any

from typer.core import TyperCommand

# The least similarity of a known option to a misspelt one, for a suggestion.
CLOSE = 0.75


# Options with names also common in scripts.
OF_SCRIPTS = ("--name", "--env", "--code", "--memory", "--cpu", "--gpus", "--setup")


def _own_options(params: Any) -> set[str]:
    """Return the options of a command, without names also common in scripts."""
    options = {option for param in params for option in param.opts if option.startswith("-")}
    return options.difference(OF_SCRIPTS, ("--help",))


def without_types(params: Any) -> Any:
    """Return the options of a command. A flag takes no value, so its type is not shown."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command with the arguments as typed in its usage: `JOB`, or `[FILE…]`."""

    def get_params(self, ctx: Any) -> Any:
        return without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [self.options_metavar] if self.options_metavar else []
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                word = param.metavar or param.name.upper()
                repeats = "…" if param.nargs != 1 and not word.endswith("…") else ""
                word += repeats
                pieces.append(word if param.required else f"[{word}]")
        return pieces

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The parser empties the list.
        words = list(args)
        try:
            rest = super().parse_args(ctx, args)
        # typer has a copy of click since some version, and does not export the class.
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                self._explain(error)
            raise
        if ctx.params.get("script") and "--" in words and not ctx.resilient_parsing:
            self._note_options_of_the_script(words[words.index("--") + 1 :])
        return rest

    def _note_options_of_the_script(self, words: list[str]) -> None:
        """Note the options of this command after `--`. They are passed to the script."""
        # Imported late to keep `--help` quick.
        from ddpjob.cli.session import note

        for option in _own_options(self.params).intersection(words):
            note(f"{option} is passed to the script; before --, it is an option of ddpjob")

    @property
    def _runs_a_script(self) -> bool:
        return any(param.name == "script" for param in self.params)

    def _explain(self, error: Any) -> None:
        """Explain the place of a script's arguments, and suggest only similar options."""
        # Imported late to keep `--help` quick.
        from difflib import get_close_matches

        option = str(error.option_name)
        error.possibilities = get_close_matches(option, error.possibilities or (), cutoff=CLOSE)
        if self._runs_a_script:
            error.message += (
                f"; an argument of the script follows after --, such as: --script train.py -- "
                f"{option}"
            )
        if any((param.metavar or "").startswith("--") for param in self.params):
            error.message += "; the command follows after --"
