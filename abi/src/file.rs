//! Read-only memory maps of external data files.

use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// A file, or a part of one, mapped read-only. Clones share the map.
#[derive(Clone)]
pub struct MappedFile(Arc<memmap2::Mmap>);

impl MappedFile {
    /// Maps `len` bytes of `path` from `offset` on. Errors when the file is missing or shorter.
    pub fn open(path: &Path, offset: u64, len: usize) -> Result<Self> {
        let problem = |problem: String| Error::Model { place: path.display().to_string(), problem };
        let file = std::fs::File::open(path).map_err(|e| problem(e.to_string()))?;
        let size = file.metadata().map_err(|e| problem(e.to_string()))?.len();
        if offset.checked_add(len as u64).is_none_or(|end| end > size) {
            return Err(problem(format!("holds {size} bytes, but bytes {offset}..+{len} are referred to")));
        }
        // SAFETY: the map is private and read-only. As with every mapped model, whoever truncates the file
        // while a session lives gets SIGBUS; ORT's own loader maps the same file under the same terms.
        let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(len).map(&file) }
            .map_err(|e| problem(e.to_string()))?;
        Ok(Self(Arc::new(map)))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Gives the pages read so far back to the system; reading them again is still right.
    pub fn forget_pages(&self) {
        // SAFETY: a read-only file mapping reloads dropped pages from the file.
        let _ = unsafe { self.0.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
}
