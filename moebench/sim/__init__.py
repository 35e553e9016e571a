"""From a recorded program to time: cost model, network model, replay, uncertainty."""
