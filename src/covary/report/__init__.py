"""What a person looks at afterwards: tables, plots and the run folder."""
