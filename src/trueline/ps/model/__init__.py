"""What a recipe's model has of parameter servers: tables, their minibatches, what its optimizer means."""
