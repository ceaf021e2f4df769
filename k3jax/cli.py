"""The ``k3jax`` command. A user's mistake is an error line on stderr and exit status 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from k3jax.commands.bench import Bench
from k3jax.commands.convert import Convert
from k3jax.commands.generate import Generate
from k3jax.commands.inspect import Inspect
from k3jax.commands.logits import Logits
from k3jax.commands.plan import Plan
from k3jax.commands.train import Train
from k3jax.errors import K3Error

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_COMMANDS = {
    "bench": Bench,
    "convert": Convert,
    "generate": Generate,
    "inspect": Inspect,
    "logits": Logits,
    "plan": Plan,
    "train": Train,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 0, 1, 130; 2 (raised) for a usage error."""
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a terminal that cannot show a character is no failure
    command = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="k3jax",
        description="Kimi K3 and Kimi K3.1 Pro in JAX and Flax.",
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        status = command.run()
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("stdout was closed before the end")
    except K3Error as error:
        return _fail(str(error))
    except OSError as error:
        named = f"{error.filename}: " if error.filename is not None else ""
        return _fail(named + (error.strerror or str(error)))


def _fail(message: str, status: int = 1) -> int:
    print(f"k3jax: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
