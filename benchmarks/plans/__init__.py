"""Plans at a budget, beside plain steps and what people do by hand."""
