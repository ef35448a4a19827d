"""Stub, being replaced."""


def table(e):
    return "\n".join(
        f"{m['name']} {m['budget']} tau {m['tau']:.2f} tok/s {m['tokens_per_second']:.0f} x{m['speedup']:.2f} {m['identical']}"
        for m in e["methods"]
    )


def write_report(folder, evaluations):
    return folder / "report.html"
