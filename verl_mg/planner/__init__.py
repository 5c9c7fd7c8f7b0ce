"""Capacity planner: memory, weight-sync bytes and predicted seconds of a job's layouts, without starting anything.

Nothing here needs a device, a process or a checkpoint. Sizes are in bytes and elements unless a name says GiB. Seconds
are predicted by a model of the hardware with few constants, fitted on published figures of other systems:
`efficiency.CALIBRATION` is its error, `tools/calibrate_plan.py` prints that of each figure.
"""
