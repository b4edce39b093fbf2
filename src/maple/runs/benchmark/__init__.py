"""The paper's suites: trainings, tables and their pages."""
