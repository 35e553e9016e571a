"""`python -m moebench`, the form that launchers of many ranks use."""

from moebench.cli import main

if __name__ == "__main__":
    main()
