"""Which replies are used, and what they may change.

It owns the checks of a reply, which arrays of a model travel, the bound on an upload, the undoing
of an update that would make the state infinite, and the watch over a run that diverges. It hands on
`Intake`, `Layout`, `Bound`, `Guard` and `Health`, each in the file of its name.
"""
