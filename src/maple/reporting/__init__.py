"""Reports: one self-contained HTML page per run, its plots (``plots/``) and its thumbnails (``gallery/``).

Reporting draws saved results and runs no model. `maple.reporting.report.write_report` is the way in.
"""
