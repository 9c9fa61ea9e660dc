//! Every flag and variable: default, unit, consequence.
