"""Local solvers: what is minimised, by which steps, for one client or for many together.

`objective.LocalObjective` is what a method minimises, `solvers` descends on it, and `features`
saves the work of frozen layers. `steps` defines how a method asks for a descent. `cohort` takes the
descents of many clients at once, those that `alike` finds to be alike in a `stack`, whose models
`calls` lets run together. `curvature` and `hessian` serve FedGiA.
"""
