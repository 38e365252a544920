//! The compiled kernels, embedded by the build script; empty without feature `cuda`.

include!(concat!(env!("OUT_DIR"), "/cuda_images.rs"));

/// The image of that name, with the name as the table has it.
pub fn find(name: &str) -> Option<(&'static str, &'static [u8])> {
    IMAGES.iter().copied().find(|(stem, _)| *stem == name)
}

/// Names of all images.
pub fn names() -> impl Iterator<Item = &'static str> {
    IMAGES.iter().map(|(stem, _)| *stem)
}
