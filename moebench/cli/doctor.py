"""`moebench doctor`: what this machine can run, what is missing, and how to get it."""

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document: a list of objects with `name`.")
def command(as_json: bool) -> None:
    """Show what this machine can run and what is missing."""
    from moebench.cli.tables import print_json, print_table
    from moebench.doctor import findings

    found = findings()
    if as_json:
        print_json([finding.to_json() for finding in found])
        return
    print_table(
        ["", "what", "found", "for"],
        [[finding.word, finding.name, finding.detail, finding.purpose] for finding in found],
    )
    for finding in found:
        if finding.advice:
            click.echo(f"{finding.name}: {finding.advice}")
