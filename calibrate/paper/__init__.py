"""The Sarathi-Serve paper (Agrawal et al., OSDI 2024): its settings, its published values, its figures from simulation,
and the fit of the profiles `sarathi-2024/…`."""
