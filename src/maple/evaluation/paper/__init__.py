"""The paper: its figures as data, and its experiments as suites of rows, columns and profiles."""
