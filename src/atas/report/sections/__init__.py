"""The sections of the page. Each function turns one run, or several, into a `Section`."""
