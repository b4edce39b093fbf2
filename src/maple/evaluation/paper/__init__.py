"""The paper's figures as data, and its suites."""
