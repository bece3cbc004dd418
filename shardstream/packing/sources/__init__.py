"""Kinds of sources, and the records that they give: folders, tables, tars, samples from Python."""
