"""What people see of a run: tables, the live display and the report. All of it is read from the record of events."""
