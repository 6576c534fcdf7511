"""`ingot doctor`"""

import typer


def doctor() -> None:
    """What works on this machine, what is missing, and the command that fixes it.

    Example: ingot doctor
    """
    from ingot.report.doctor import examine

    findings = examine()
    for finding in findings:
        fix = f"  ->  {finding.fix}" if finding.fix and finding.state != "ok" else ""
        print(f"{finding.state:>4}  {finding.what:<18} {finding.detail}{fix}")
    raise typer.Exit(1 if any(f.state == "fail" for f in findings) else 0)
