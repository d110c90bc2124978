"""Reports: the run folder, tables, plots and the report page."""
