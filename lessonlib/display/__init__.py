"""How the course looks: colors, frames of figures, pictures, tables, and what is stored of them."""
