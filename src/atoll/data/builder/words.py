"""What a build did, and what it can read, as text."""

from __future__ import annotations

from typing import Any

from atoll.data.builder.recipes import installed, recipes


def render(manifest: dict[str, Any]) -> str:
    """What a build did, as text."""
    lines = []
    for s in manifest["sources"]:
        out = ", ".join(f"{n:,} {why}" for why, n in s["dropped"].items()) or "none"
        lines.append(f"{s['name']} ({s['licence']}): {s['kept']:,} of {s['files']:,} files kept; left out: {out}")
        copies = s["records"] - s["documents"]
        lines.append(
            f"  {s['documents']:,} documents, {s['chars'] / 1e6:,.1f} M characters"
            + (f", {copies:,} copies of long ones" if copies else "")
        )
    if manifest["evidence"]["records"]:
        e = manifest["evidence"]
        lines.append(f"evidence: {e['records']:,} composed documents, {e['questions']:,} questions, {e['chars'] / 1e6:,.1f} M characters")
    size = sum(s["bytes"] for s in manifest["shards"])
    lines.append(f"{manifest['totals']['records']:,} records in {len(manifest['shards']):,} shards, {size / 1e6:,.1f} MB")
    return "\n".join(lines)


def catalogue() -> dict[str, Any]:
    """Every recipe, and whether its files are here."""
    rows = []
    for r in recipes().values():
        origin = installed(r)
        rows.append(
            {"name": r.name, "about": r.about, "licence": r.licence, "install": r.install, "files": len(origin.files) if origin else 0}
        )
    return {"recipes": rows}


def render_catalogue(found: dict[str, Any]) -> str:
    """The recipes as an aligned table."""
    rows = [(r["name"], f"{r['files']:,} files here" if r["files"] else r["install"], r["licence"], r["about"]) for r in found["recipes"]]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows)
