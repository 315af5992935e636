"""A tab in Locust's web UI: one line per SLO class, which can be downloaded as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flask import Response, request

from adaserve.slo.run_summary import percent

if TYPE_CHECKING:
    from locust.env import Environment

_KEY = "slo"
_COLUMNS = {
    "name": "Class",
    "requests": "# Requests",
    "failed": "# Fails",
    "slo": "TPOT SLO (ms)",
    "mean_tpot": "Mean TPOT (ms)",
    "p99_tpot": "99%ile TPOT (ms)",
    "ttft": "Median TTFT (ms)",
    "attainment": "Attainment (%)",
    "tokens": "Tokens in time",
}


def install_tab(environment: Environment, rows: Callable[[], list[dict[str, Any]]]) -> None:
    """``rows`` gives the live table (see Recorder.rows)."""
    web_ui = environment.web_ui
    assert web_ui is not None
    web_ui.template_args["extended_tabs"] = [{"title": "SLO classes", "key": _KEY}]
    structure = [{"key": k, "title": t} for k, t in _COLUMNS.items()]
    web_ui.template_args["extended_tables"] = [{"key": _KEY, "structure": structure}]
    web_ui.template_args["extended_csv_files"] = [
        {"href": "slo_classes/csv", "title": "Download SLO classes CSV"}
    ]

    @web_ui.app.after_request
    def extend_stats(response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            data = response.get_json()
            data["extended_stats"] = [{"key": _KEY, "data": [display_row(r) for r in rows()]}]
            response.set_data(web_ui.app.json.dumps(data))
        return response

    @web_ui.app.route("/slo_classes/csv")
    def slo_csv() -> Response:
        headers = {"Content-Disposition": "attachment; filename=slo_classes.csv"}
        return Response(table_csv(rows()), mimetype="text/csv", headers=headers)


def table_csv(rows: Iterable[dict[str, Any]]) -> str:
    """The live table as a download; a class's name may hold commas."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS.values())
    writer.writerows([display_row(row)[key] for key in _COLUMNS] for row in rows)
    return text.getvalue()


def display_row(row: dict[str, Any]) -> dict[str, Any]:
    """A line of the live table as the web UI shows it."""

    def ms(key: str) -> str:
        return "" if row.get(key) is None else f"{row[key]:.1f}"

    return {
        "name": row["name"],
        "requests": row["requests"],
        "failed": row["failed"],
        "slo": ms("slo_tpot_ms"),
        "mean_tpot": ms("mean_tpot_ms"),
        "p99_tpot": ms("p99_tpot_ms"),
        "ttft": ms("p50_ttft_ms"),
        "attainment": "" if row["attainment"] is None else percent(row["attainment"]),
        "tokens": row["good_tokens"],
    }
