"""Answers of the page and of the webhook that say why something was refused."""

from __future__ import annotations

from starlette.responses import JSONResponse


def error(status: int, text: str, remedy: str = "") -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": text, "remedy": remedy}, status_code=status, headers=headers)
