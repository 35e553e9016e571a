"""From a real program to a recorded one: the dispatch-mode recorder and what it knows of operators."""
