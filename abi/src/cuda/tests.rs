use super::*;

#[test]
fn a_machine_without_a_driver_gets_a_sentence_and_no_panic() {
    // SAFETY: opens libcuda as the function under test does.
    if unsafe { sys::is_culib_present() } {
        assert!(devices().map_or_else(|why| !why.is_empty(), |found| !found.is_empty()));
        return;
    }
    let why = devices().unwrap_err();
    assert_eq!(why, "the NVIDIA driver's library libcuda.so.1 was not found");
    let error = Context::new(0).err().expect("there is no driver");
    assert!(matches!(error, Error::Cuda { call: "cuInit", code: 3, .. }));
    assert_eq!(error.to_string(), format!("CUDA call cuInit failed: {why}"));
}

#[test]
fn an_old_driver_is_named_with_both_versions() {
    assert_eq!(check_version(13000), Ok(()));
    assert_eq!(check_version(13020), Ok(()));
    let why = check_version(12090).unwrap_err();
    assert!(why.contains("supports CUDA 12.9,") && why.contains("CUDA 13.0 or newer"), "{why}");
}

#[test]
fn the_pci_id_is_the_upper_half_of_nvidias_pair() {
    assert_eq!(pci_device(0x2335_10de), 0x2335);
    assert_eq!(pci_device(0), 0);
}

#[test]
fn device_memory_says_all_that_is_known() {
    let error = Error::DeviceMemory { asked: 11, used: 22, free: 33, limit: 44, purpose: "weights".into() };
    let text = "could not allocate 11 bytes of GPU memory for weights: \
                22 bytes of at most 44 are in use, 33 are free on the device";
    assert_eq!(error.to_string(), text);
}

#[test]
fn only_the_drivers_own_code_is_out_of_memory() {
    let error = |code| Error::Cuda { call: "cuMemAlloc", code, message: String::new() };
    assert!(is_out_of_memory(&error(2)));
    assert!(!is_out_of_memory(&error(1)));
}

#[test]
fn objects_are_shared_between_threads_except_graphs() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Context>();
    shared::<Stream>();
    shared::<Event>();
    shared::<Library>();
    shared::<Function>();
    shared::<DeviceBuffer>();
    sent::<Graph>();
    sent::<Exec>();
}
