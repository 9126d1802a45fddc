"""Which reply is believed, and what it may do.

It owns the checks of a reply, what of a model travels, the bound on an upload, the undoing of an
update that would make the state infinite, and the watch over a run that gets nowhere. It hands on
`Intake`, `Layout`, `Bound`, `Guard` and `Health`, each in the file of its name.
"""
