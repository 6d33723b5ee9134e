"""What tests share: references written from the equations, test cases and the error rule."""
