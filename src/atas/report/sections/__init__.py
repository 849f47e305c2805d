"""The sections of the page. Each function returns a `Section` of one run or of several; templates hold the HTML."""
