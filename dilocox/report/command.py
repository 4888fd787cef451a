"""`dilocox report RUN`: figures and one self-contained page for a finished or running run."""

from __future__ import annotations

import argparse
import html
import io
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from dilocox.atomic import write_atomic
from dilocox.report.figures import FIGURES
from dilocox.report.rows import event_rows, fact_rows, headline
from dilocox.report.run_data import RunData, read_run
from dilocox.run_folder import LOSS_FIGURE, PAGE, figures_dir

_CAPTIONS = {
    "loss": "Thin lines are single steps, thick ones their moving mean. The anchor is what the run delivers.",
    "bytes": "Payload handed to the collective. Dashed: what plain data parallel training would send.",
    "pseudo_gradients": "Of the first island. A cosine near 1 means that the islands agree; "
    "a norm that jumps means that an island has diverged.",
    "time": "A sync that runs behind inner steps blocks nothing: red dots at zero are ideal.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draws the figures of a run, finished or under way, and writes report.html."
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder, for example runs/demo")


def main(args: argparse.Namespace) -> int:
    page = write(args.folder)
    print(f"{page} (and figures in {page.parent})")
    return 0


def write(run_dir: Path) -> Path:
    """Writes `loss.png`, `figures/NAME.png` and `report.html`.

    Returns: path of the page.

    Raises:
        ConfigError: not a run folder.
    """
    run = read_run(run_dir)
    sections = []
    figures = figures_dir(run_dir)
    figures.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw(run)
        figure.savefig(figures / f"{name}.png", dpi=150)
        if name == "loss":
            figure.savefig(run_dir / LOSS_FIGURE, dpi=150)
        sections.append(f"<figure>{_svg(figure)}<figcaption>{_CAPTIONS[name]}</figcaption></figure>")
    page = run_dir / PAGE
    write_atomic(page, _page(run, sections))
    return page


def _page(run: RunData, sections: Iterable[str]) -> str:
    template = resources.files("dilocox.report").joinpath("page.html").read_text()
    sample = run.summary.get("sample")
    return Template(template).substitute(
        title=html.escape(f"{run.name} · dilocox"),
        name=html.escape(run.name),
        headline=html.escape(headline(run)),
        facts=_table(fact_rows(run)),
        figures="\n".join(sections),
        sample=f"<h2>Text from the anchor</h2><pre>{html.escape(str(sample))}</pre>" if sample else "",
        events=_table(event_rows(run)),
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in rows)
    return "<table>" + "".join(cells) + "</table>"


def _svg(figure: Figure) -> str:
    """The figure as an element of a page, without the XML head."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
