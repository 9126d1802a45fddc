"""Local solvers: objectives, steps, one client or many together, curvature."""
