"""A plan as tables in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table

from k3jax.plan import Plan, Refused, unlisted_collectives
from sharding.report import Collective


def _right(name: str) -> Column:
    return Column(name, justify="right")


def size(n: float) -> str:
    """Bytes in decimal units, two digits after the point where they say something."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:,.0f} B" if unit == "B" else f"{n:,.2f} {unit}"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def render(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan."""
    console = console or Console()
    step, mesh = plan.step, " x ".join(f"{a} {n}" for a, n in plan.layout.mesh.items())
    what = "decode, one token" if step.kind == "decode" else f"prefill, {step.tokens} tokens"
    console.print(
        f"[bold]{plan.model}[/] on {plan.layout.name}: {plan.layout.num_devices} devices of "
        f"{plan.layout.chip} ({mesh})",
        highlight=False,
    )
    console.print(
        f"{what} for each of {step.batch} sequences, context {step.context:,}", highlight=False
    )
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    console.print(_memory(plan))
    console.print(_components(plan))
    if plan.collectives:
        console.print(_collectives(plan.collectives))
    if plan.compiled:
        console.print(_compiled(plan))
        for one in unlisted_collectives(plan):
            shapes = ", ".join(f"{d}{list(s)}" for d, s in one.results)
            console.print(
                f"the compiler added: {one.kind} over {one.axes} of {shapes} ({one.op_name})",
                style="red",
                markup=False,
            )
    console.print(_figures(plan))
    color = {True: "green", False: "red", None: ""}[plan.fits]
    console.print(plan.verdict(), style=color, markup=False)
    if plan.seconds:
        console.print(
            f"estimate: {duration(plan.seconds)} a step, {plan.tokens_per_second:,.0f} tokens/s",
            highlight=False,
        )


def _memory(plan: Plan) -> Table:
    table = Table("memory of a device", _right("bytes"), _right("share"))
    total = sum(plan.memory.values())
    for kind, n in plan.memory.items():
        mark = " (estimate)" if kind == "workspace" else ""
        table.add_row(kind + mark, size(n), f"{n / total:.1%}")
    table.add_section()
    table.add_row("all", size(total), "")
    return table


def _components(plan: Plan) -> Table:
    table = Table(
        "component",
        *(_right(n) for n in ("Gop", "moved", "sent")),
        *((_right("time (estimate)"), "bound") if plan.times else ()),
    )
    sent: dict[str, int] = {}
    for c in plan.collectives:
        sent[c.component] = sent.get(c.component, 0) + c.total_bytes
    for name in dict.fromkeys((*plan.times, *plan.work, *sent)):
        work, time = plan.work.get(name), plan.times.get(name)
        row = [
            name,
            f"{work.operations / 1e9:,.2f}" if work else "",
            size(work.bytes) if work else "",
            size(sent.get(name, 0)),
        ]
        if time:
            bounds = {
                "operations": time.operations,
                "memory": time.memory,
                "links": time.links,
            }
            row += [duration(time.total), max(bounds, key=lambda b: bounds[b])]
        table.add_row(*row)
    return table


def _collectives(found: tuple[Collective, ...]) -> Table:
    table = Table(
        Column("collective", no_wrap=True),
        *("component", "over"),
        *(_right(name) for name in ("of a device", "times", "sent")),
    )
    for c in found:
        dtype = c.dtype.replace("bfloat", "bf").replace("float", "f").replace("int", "s")
        shape = f"{dtype}[{','.join(map(str, c.shape))}]"
        mark = "" if c.exact else " at most"
        table.add_row(
            c.kind,
            c.component,
            ",".join(c.axes) + f" ({c.ranks})",
            shape,
            str(c.times),
            size(c.total_bytes) + mark,
        )
    table.add_section()
    totals: dict[tuple[str, ...], int] = {}
    for c in found:
        totals[c.axes] = totals.get(c.axes, 0) + c.total_bytes
    for axes, n in totals.items():
        table.add_row("all", "", ",".join(axes), "", "", size(n))
    return table


def _compiled(plan: Plan) -> Table:
    c = plan.compiled
    assert c is not None
    table = Table("the compiler says", "")
    for what, n in (
        ("arguments", c.argument_bytes),
        ("outputs", c.output_bytes),
        ("outputs in place of arguments", c.alias_bytes),
        ("temporaries", c.temporary_bytes),
        ("program", c.code_bytes),
        ("all", c.total_bytes),
    ):
        table.add_row(what, size(n))
    table.add_row("plan's arguments / compiler's", f"{plan.agreement:.4f}")
    table.add_row("seconds to compile", f"{c.seconds:.1f}")
    table.add_row("host memory at most", size(c.host_peak_bytes))
    table.add_row("collectives in the HLO", str(len(c.collectives)))
    table.add_row("of them not in the plan", str(len(unlisted_collectives(plan))))
    return table


def _figures(plan: Plan) -> Table:
    f = plan.figures
    kib, mib = 1024, 1024**2
    table = Table("figures of the model", "")
    table.add_row("cache of a token", f"{f['cache_per_token'] / kib:.4g} KiB")
    state = f["kda_state_bfloat16"] / mib, f["kda_state_float32"] / mib
    table.add_row(
        "KDA state of a sequence", f"{state[0]:.0f} MiB (bf16), {state[1]:.0f} MiB (fp32)"
    )
    table.add_row("block vectors of a token", f"{f['block_vectors_per_token'] / kib:.0f} KiB")
    dense = f"{size(f['dense_latents_at_million'])}, dense"
    table.add_row("read for a token after 10^6 tokens", dense)
    if "index_keys_at_million" in f:
        keys, chosen = f["index_keys_at_million"], f["selected_latents_at_million"]
        table.add_row("", f"{size(keys)} of fp8 index keys + {size(chosen)} of latents, sparse")
    return table


def render_comparison(ranked: list[Plan | Refused], console: Console | None = None) -> None:
    """Prints layouts from the best to those that do not work, with the reasons."""
    console = console or Console()
    table = Table(
        _right("rank"),
        Column("layout", no_wrap=True),
        Column("devices", no_wrap=True),
        _right("GB each"),
        _right("ms a step"),
        _right("tokens/s"),
        _right("a device"),
        title="estimates",
    )
    reasons = []
    for rank, one in enumerate(ranked, 1):
        if isinstance(one, Refused):
            table.add_row("-", one.name)
            reasons.append(f"{one.name} is refused: {one.reason}")
            continue
        layout, speed, seconds = one.layout, one.tokens_per_second, one.seconds
        row = [
            "-" if one.fits is False else str(rank),
            layout.name,
            f"{layout.num_devices} {layout.chip}",
            f"{one.bytes / 1e9:,.1f}",
        ]
        if speed and seconds:
            row += [f"{1e3 * seconds:,.2f}", f"{speed:,.0f}", f"{speed / layout.num_devices:,.1f}"]
        table.add_row(*row)
        reasons += [f"{layout.name}: {note}" for note in one.notes]
        if not one.fits:
            reasons.append(f"{layout.name} {one.verdict()}")
    console.print(table)
    for reason in reasons:
        console.print(reason, markup=False)
