"""`moebench launch`: the exact lines that start a suite on a real cluster."""

import click


@click.command()
@click.option("--suite", required=True, metavar="NAME|FILE", help="Suite by name, or a suite file of your own.")
@click.option("--topology", "asked", required=True, metavar="T", help="What the cluster is: 4x8-a100-80, or a file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: a list of objects with `name` and `line`.")
def command(suite: str, asked: str, as_json: bool) -> None:
    """Print how to start SUITE on the ranks of a cluster, with torchrun or SLURM.

    Every rank runs the same command; rank 0 writes the run folder.
    """
    from dataclasses import asdict

    from moebench.cases.plan import Filters
    from moebench.cli.tables import print_json
    from moebench.cluster.commands import starts
    from moebench.run import prepare
    from moebench.workloads.load import load_suite, load_topology

    topology = load_topology(asked)
    loaded = load_suite(suite)
    found = starts(suite, topology, asked)  # what one rank can't be started as comes before what a suite has for it
    prepare(loaded, Filters(topologies=(asked,)), "cluster")
    if as_json:
        print_json([asdict(start) for start in found])
        return
    for start in found:
        click.echo(f"# {start.where}")
        click.echo(start.line)
