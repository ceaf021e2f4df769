"""Errors a user can cause. The command line prints them without a traceback and exits with 1."""


class K3Error(ValueError):
    """Base of every error that names a bad input and its value."""


class ConfigError(K3Error):
    """A model configuration that is refused; the message names the field and its value."""


class CheckpointError(K3Error):
    """Everything wrong with a checkpoint, reported at once.

    Attributes:
      problems: one line per fault, each naming the file or tensor and the value.
    """

    def __init__(self, where: str, problems: list[str]):
        self.problems = list(problems)
        head = f"{where}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([head, *problems]))


class InputError(K3Error):
    """A prompt, token id, length or option outside what the model or the cache accepts."""
