"""The one error of this package."""


class LayoutError(ValueError):
    """A layout, or arrays under a layout, that cannot be run; everything wrong at once.

    Attributes:
      problems: one line per fault, each naming the axis or array and the values.
    """

    def __init__(self, where: str, problems: list[str]):
        self.problems = list(problems)
        head = f"{where}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join([head, *problems]))
