"""Parts of checkpoints for tests."""


class Numbers:
    """A part with a state given by the test."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)
