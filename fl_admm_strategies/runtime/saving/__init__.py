"""What outlives the process: files, checkpoints, the history of what was measured, resuming.

It owns the folder of a run and the form of a saved state, and hands on `Resume`, `Checkpoints`,
`History`, `PendingReplies` (of instructions that were sent) and the functions of `state`.
"""
