//! Counters of a library that other languages read from its file.

/// Exports `name(names, values, room) -> count`: fills at most `room` names (static, NUL-terminated) and values, and says
/// how many counters there are. Either pointer may be null.
///
/// The arguments are the function's name, a `&[&CStr]` and a function that gives the values in that order.
#[macro_export]
macro_rules! export_counters {
    ($name:ident, $names:expr, $values:expr) => {
        /// Reads the counters.
        ///
        /// # Safety
        /// `names` and `values` are null or have room for `room` entries.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(names: *mut *const ::std::ffi::c_char, values: *mut u64, room: usize) -> usize {
            for (i, (text, value)) in $names.iter().zip($values()).enumerate().take(room) {
                // SAFETY: the caller vouches for the room.
                unsafe {
                    if !names.is_null() {
                        names.add(i).write(text.as_ptr());
                    }
                    if !values.is_null() {
                        values.add(i).write(value);
                    }
                }
            }
            $names.len()
        }
    };
}
