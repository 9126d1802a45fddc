"""What outlives the process: files, checkpoints, the history of what was measured, resuming.

It owns the folder of a run and the form of a saved state, and hands on `Resume`, `Checkpoints`,
`History`, `Underway` (instructions whose replies are still to come) and the functions of `state`.
"""
