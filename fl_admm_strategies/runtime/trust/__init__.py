"""Which replies are used, and what they may change.

It owns the checks of a reply, which arrays of a model travel, the bound on an upload, and the watch
over a run that diverges. It hands on `ReplyValidation`, `Layout`, `UploadLimit`
and `DivergenceMonitor`.
"""
