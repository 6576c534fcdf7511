"""Valid names of runs and splits. Each becomes a folder, so that none may lead to another folder."""

_MOST_BYTES = 200  # file systems take 255; suffixes such as .partial are added


def plain_name(value: str) -> str:
    """The name unchanged, if it is one plain name; otherwise a ValueError says what is allowed."""
    is_path = value.startswith(".") or "/" in value or "\\" in value
    if is_path or not value.isprintable() or value != value.strip() or not 0 < len(value.encode()) <= _MOST_BYTES:
        raise ValueError(
            "must be one plain name of 1 to 200 bytes, since it names a folder: no / or \\, no leading dot, no control "
            "characters, no space at either end"
        )
    return value


def plain_name_from(text: str) -> str:
    """The plain name closest to that of a file or folder, for a run without a name."""
    name = "".join(c if c.isprintable() and c not in "/\\" else "-" for c in text).lstrip(". ")
    return name.encode()[:_MOST_BYTES].decode(errors="ignore").rstrip() or "run"
