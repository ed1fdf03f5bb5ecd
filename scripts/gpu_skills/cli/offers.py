"""`gpu offers`: what could be used now, at which rate, and what it would cost in the end."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from gpu_skills.cli.base import command
from gpu_skills.cli.context import OWN_PROVIDERS, RENTED_PROVIDERS, Context
from gpu_skills.cli.output import Output, table
from gpu_skills.errors import GpuError, MissingCredential, NoOffers, UsageError
from gpu_skills.units import format_usd

if TYPE_CHECKING:
    from gpu_skills.config import GpuConfig
    from gpu_skills.lifecycle.plans.offers import Ranking
    from gpu_skills.providers.base import Requirements, Search

SHORT = 3
PROVIDERS = (*OWN_PROVIDERS, *RENTED_PROVIDERS)


@command(
    "offers",
    reads_only=True,
    example="gpu offers --gpu 'RTX 4090' --disk-gb 100 --hours 3 --json",
    exits="0 done · 1 failed · 2 usage · 3 no network allowed · 5 nothing fits, or the provider failed",
)
@click.option("--gpu", metavar="NAME", multiple=True, help="Model; may be repeated. Default: gpu.yaml.")
@click.option("--count", type=click.IntRange(1, 64), help="GPUs on the one machine.")
@click.option("--min-vram-gb", type=click.FloatRange(0), help="Memory of each GPU, by its label.")
@click.option("--disk-gb", type=click.FloatRange(1), help="Disk to price in.")
@click.option("--hours", type=click.FloatRange(0.01, 8760), default=1.0, show_default=True, help="How long it is used.")
@click.option(
    "--download-gb", type=click.FloatRange(0), default=0.0, show_default=True, help="Fetched beside the image."
)
@click.option("--max-rate", type=click.FloatRange(min=0, min_open=True), help="USD an hour at most, disk included.")
@click.option("--min-down-mbps", type=click.FloatRange(0), help="Download speed in megabits per second.")
@click.option("--min-reliability", type=click.FloatRange(0, 1), help="Where stated. Default: 0.95.")
@click.option("--location", metavar="CODE", multiple=True, help="Country, or a data centre of runpod; may be repeated.")
@click.option("--interruptible", is_flag=True, help="Machines that may be taken away, for less (vast only).")
@click.option("--provider", metavar="P", multiple=True, help=f"Only these: {', '.join(PROVIDERS)}; may be repeated.")
@click.option(
    "--sort", type=click.Choice(["total", "rate"]), default="total", show_default=True, help="Cheapest first."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Rows to show.")
def offers(
    context: Context,
    provider: tuple[str, ...],
    hours: float,
    download_gb: float,
    sort: str,
    limit: int,
    **wish: Any,
) -> Output:
    """This machine, your hosts and what can be rented: GPUs, disk, rate, total. Reads only.

    Defaults come from gpu.yaml. Rates include the wanted disk; totals also start-up, download and traffic.
    """
    from gpu_skills.lifecycle import memory
    from gpu_skills.lifecycle.plans import offers as ranking
    from gpu_skills.lifecycle.plans.offers import Use

    for name in provider:
        if name not in PROVIDERS:
            raise UsageError(f"unknown provider {name!r}", next_step=f"use one of {', '.join(PROVIDERS)}")
    need = _need(context.config, hours=hours, **wish)
    use = Use(hours, download_gb)
    rows = _own_rows(context, need, provider, hours)
    searches, providers = _search(context, need, provider)
    now = context.clock.now()
    known = memory.load(context.project) if searches else {}
    ranked = ranking.rank(searches, use, known, now=now, by=sort)
    rows += [ranking.row(e, use) for e in ranked.estimates]
    # What fits first; among it the cheapest by the chosen price.
    rows.sort(key=lambda r: (not r["fits"], r["total_usd" if sort == "total" else "rate_usd_hr"]))
    for entry in providers:
        entry["filters"] = ranking.table_json(ranked.filters.get(entry["provider"], []))
        entry["considered"] = ranked.considered.get(entry["provider"])
    if not any(row["fits"] for row in rows):
        _nothing_fits(rows, providers, ranked)
    document = {
        "offers": rows[:limit],
        "left_out": max(0, len(rows) - limit),
        "providers": [{k: v for k, v in entry.items() if k != "exception"} for entry in providers],
        "cooling": ranking.cooling(known, now),
    }
    return Output(document, _as_table(rows[:limit]), hints=_hints(document, ranked, context.config.provider))


def _need(
    config: GpuConfig,
    *,
    gpu: tuple[str, ...],
    count: int | None,
    min_vram_gb: float | None,
    disk_gb: float | None,
    max_rate: float | None,
    min_down_mbps: float | None,
    min_reliability: float | None,
    location: tuple[str, ...],
    interruptible: bool,
    hours: float,
) -> Requirements:
    """gpu.yaml with what the flags say otherwise. For the ceiling the stricter of both holds."""
    from gpu_skills.providers.base import DEFAULT_MIN_RELIABILITY, Requirements

    compute = config.compute
    asked = list(gpu) or [name for name in (compute.gpu, *compute.candidates) if name]
    ceilings = [c for c in (compute.max_rate_usd_hr, None if max_rate is None else Decimal(str(max_rate))) if c]
    return Requirements(
        gpu=asked[0] if asked else None,
        candidates=tuple(asked[1:]),
        gpu_count=count or compute.gpu_count,
        min_vram_gb=compute.min_vram_gb if min_vram_gb is None else min_vram_gb,
        disk_gb=compute.disk_gb if disk_gb is None else disk_gb,
        max_rate_usd_hr=min(ceilings, default=None),
        hours=hours,
        min_down_mbps=min_down_mbps,
        min_reliability=DEFAULT_MIN_RELIABILITY if min_reliability is None else min_reliability,
        locations=location,
        interruptible=interruptible,
    )


def _own_rows(context: Context, need: Requirements, wanted: tuple[str, ...], hours: float) -> list[dict[str, Any]]:
    """This machine and the user's hosts, each looked at now."""
    from gpu_skills.lifecycle.plans import survey

    config = context.config
    compute = replace(
        config.compute,
        gpu=need.gpu,
        candidates=need.candidates,
        gpu_count=need.gpu_count,
        min_vram_gb=need.min_vram_gb,
    )
    config = replace(config, compute=compute)
    usual = dict.fromkeys(["local", *(["ssh"] if context.config.provider == "ssh" or context.has_hosts else [])])
    rows: list[dict[str, Any]] = []
    for name in wanted or usual:
        if name not in OWN_PROVIDERS:
            continue
        for offer in context.provider(name).offers(survey.no_need()):
            row = survey.look(offer, config, context.connect)
            rows.append({**row, "hours": hours, "total_usd": round(row["rate_usd_hr"] * hours, 6)})
    return rows


def _search(
    context: Context, need: Requirements, wanted: tuple[str, ...]
) -> tuple[dict[str, Search], list[dict[str, Any]]]:
    """Every rented provider with a key. One that fails does not hide the others; a wrong question is raised at once."""
    searches: dict[str, Search] = {}
    told: list[dict[str, Any]] = []
    for name in RENTED_PROVIDERS:
        if wanted and name not in wanted:
            continue
        entry: dict[str, Any] = {"provider": name, "state": "searched", "error": None, "is_cut": False}
        told.append(entry)
        try:
            reader = context.provider(name)
        except MissingCredential:
            if name in wanted:
                raise
            entry["state"] = "no_credential"
            continue
        try:
            searches[name] = reader.search(need)
            entry["is_cut"] = searches[name].is_cut
            context.note_provider(name)
        except UsageError:
            raise
        except GpuError as exc:
            entry.update(state="failed", error={"code": exc.code, "message": exc.message}, exception=exc)
    return searches, told


def _nothing_fits(rows: list[dict[str, Any]], providers: list[dict[str, Any]], ranked: Ranking) -> None:
    """An error where something rented was looked for. A provider that failed is not a provider without offers."""
    from gpu_skills.providers.selection import in_words

    for entry in providers:
        if "exception" in entry:
            raise entry["exception"]
    if not ranked.filters:
        return
    told = [f"{name}: {in_words(table)}" for name, table in ranked.filters.items()]
    raise NoOffers(
        filters_text=" | ".join(told),
        filters={entry["provider"]: entry["filters"] for entry in providers if entry["state"] == "searched"},
        own=[{"host": row["host"], "why_not": row["why_not"]} for row in rows],
    )


def _hints(document: dict[str, Any], ranked: Ranking, project_provider: str) -> list[str]:
    from gpu_skills.providers.selection import in_words

    hints: list[str] = []
    for entry in document["providers"]:
        name = entry["provider"]
        if entry["state"] == "failed":
            hints.append(f"{name} failed: {entry['error']['message']} [{entry['error']['code']}]")
        elif entry["state"] == "no_credential":
            if name == project_provider:
                hints.append(f"{name} was not asked: no key (gpu login {name})")
        elif sum(e.offer.provider == name for e in ranked.estimates) < SHORT:
            hints.append(f"{name}, {entry['considered']} looked at: {in_words(ranked.filters[name])}")
    if document["left_out"]:
        hints.append(f"{document['left_out']} more: --limit N")
    return hints


def _as_table(rows: list[dict[str, Any]]) -> str:
    def shown(value: Any, form: str = "g") -> str:
        return "-" if value is None else format(value, form) if isinstance(value, int | float) else str(value)

    cells = [
        [
            r["provider"],
            r["host"],
            shown(r.get("machine_id")),
            f"{r['gpu_count']} × {r['gpu']}" if r["gpu_count"] else "-",
            shown(r["vram_gb"]),
            shown(r["disk_free_gb"], ".0f"),
            format_usd(r["rate_usd_hr"]),
            format_usd(r["total_usd"]),
            shown(r.get("startup_s")),
            shown(r.get("reliability"), ".3f"),
            shown(r.get("down_mbps"), ".0f"),
            shown(r.get("location")),
            shown(r.get("duration_h"), ".0f"),
            "yes" if r["fits"] else f"no: {r['why_not']}",
        ]
        for r in rows
    ]
    header = ["PROVIDER", "OFFER", "MACHINE", "GPU", "VRAM_GB", "DISK_FREE_GB", "USD/H", "TOTAL_USD", "START_S"]
    return table(cells, [*header, "RELIABILITY", "DOWN_MBPS", "LOCATION", "LEFT_H", "FITS"])
