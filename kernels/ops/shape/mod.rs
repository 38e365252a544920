//! Ops about shapes: Shape, Size, Reshape, Flatten, Squeeze, Unsqueeze, Constant, ConstantOfShape.

pub mod constant;
pub mod reshape;
pub mod size;
pub mod squeeze;

#[cfg(test)]
mod tests;
