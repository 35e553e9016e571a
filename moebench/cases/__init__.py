"""From a suite and the user's filters to the list of cases: each experiment's points and where they run."""
