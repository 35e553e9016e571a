"""From a recorded program to time: cost model, network model, replay, uncertainty."""

# Number of the cost model: raise it when the same program gets another time for a reason that is no regression of any
# program. Comparisons then say `re-based` and not `slower`.
COST_MODEL = 1
