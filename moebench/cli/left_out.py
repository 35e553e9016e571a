"""What is said of other packages' systems that can't be asked for."""

import click


def tell_left_out() -> None:
    """Name on standard error, with package and reason, every system whose name is taken or none."""
    from moebench.systems.registry import misnamed

    for lost in misnamed():
        click.echo(f"moebench: package {lost.package}: its system {lost.name} is left out: {lost.reason}", err=True)
