"""`paceline report`: everything that can be made of a folder."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from paceline.report.figure import draw_figure
from paceline.report.folder import report_of_folder
from paceline.report.graph_picture import check_suffix, save
from paceline.report.markdown import render_markdown
from paceline.report.trace import write_trace


def write_all(folder: Path, *, open_page: bool, png: Path | None, markdown: Path | None, trace: Path | None) -> None:
    """Write the page, and whatever else was asked for, and say where it is.

    Args:
        folder: of a race or a run.
        open_page: show the page in the browser.
        png: a picture, `.png` or `.svg`.
        markdown: the tables.
        trace: for Perfetto.
    """
    if png is not None:
        check_suffix(png)
    page, kept = report_of_folder(folder)
    print(f"Report: {page}")
    if png is not None:
        save(draw_figure(kept.race, kept.runs), png)
        print(f"Picture: {png}")
    if markdown is not None:
        markdown.write_text(render_markdown(kept.race, kept.runs), encoding="utf-8")
        print(f"Tables: {markdown}")
    if trace is not None:
        write_trace(trace, kept.runs)
        print(f"Trace: {trace}")
    if open_page and not webbrowser.open(page.as_uri()):
        print("No browser was found; open the page by hand.")
