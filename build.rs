//! Compiles the CUDA kernels (`kernels/**/*.cu`) to one compressed image each, and writes the table of them that
//! `kernels::cuda::images` includes. Without feature `cuda` the table is empty.
//!
//! `CUDA_HOME` names the toolkit (else `.cuda/nvidia/cu13`, where the Makefile installs it, or `/usr/local/cuda`).
//! `NXRT_CUDA_ARCHS` chooses targets: `ship` (default), or a list such as `80,90a`; `emulated` embeds the names alone,
//! for the tests' fake driver.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs, thread};

/// Targets of a release: machine code for each architecture, and PTX for those to come.
const SHIP: &str = "80,86,89,90a,100f,120,compute_90";

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=NXRT_CUDA_ARCHS");
    println!("cargo::rerun-if-changed=build.rs");
    let sources = if env::var_os("CARGO_FEATURE_CUDA").is_some() { sources(&root.join("kernels")) } else { Vec::new() };
    let archs = env::var("NXRT_CUDA_ARCHS").unwrap_or_else(|_| SHIP.into());
    let archs = if archs == "ship" { SHIP.to_owned() } else { archs };
    let images: Vec<_> = sources.iter().map(|source| out.join(format!("{}.fatbin", stem(&root, source)))).collect();
    if archs == "emulated" {
        // No nvcc made these: without the note of targets a later build with nvcc makes all of them anew.
        let _ = fs::remove_file(out.join("archs"));
        for (source, image) in sources.iter().zip(&images) {
            fs::write(image, format!("NXRT_EMULATED {}\n", stem(&root, source))).expect("OUT_DIR is writable");
        }
    } else if !sources.is_empty() {
        compile_all(&root, &out, &archs, &sources, &images);
    }
    let mut table = String::from("/// Name and bytes of every image.\npub const IMAGES: &[(&str, &[u8])] = &[\n");
    for (source, image) in sources.iter().zip(&images) {
        let _ = writeln!(table, "    ({:?}, include_bytes!({:?})),", stem(&root, source), image);
    }
    table.push_str("];\n");
    fs::write(out.join("cuda_images.rs"), table).expect("OUT_DIR is writable");
}

/// Every `.cu` under `folder`, sorted; tells cargo to watch these and the headers.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let extension = path.extension().and_then(|e| e.to_str());
            match extension {
                _ if path.is_dir() => folders.push(path),
                Some("cu") => found.push(path),
                Some("cuh") => println!("cargo::rerun-if-changed={}", path.display()),
                _ => {}
            }
        }
    }
    found.iter().for_each(|path| println!("cargo::rerun-if-changed={}", path.display()));
    found.sort();
    found
}

/// The image's name: `ops/<op>/cuda.cu` is `<op>`, `ops/<op>/<part>.cu` is `<op>_<part>`, `cuda/cuda.cu` is `cuda`.
fn stem(root: &Path, source: &Path) -> String {
    let inside = source.strip_prefix(root.join("kernels")).expect("found under kernels").with_extension("");
    let parts: Vec<_> = inside.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let parts = if parts.first().is_some_and(|p| p == "ops") { &parts[1..] } else { &parts[..] };
    let parts = match parts {
        [folders @ .., last] if last == "cuda" && !folders.is_empty() => folders,
        all => all,
    };
    parts.join("_")
}

/// Runs nvcc over every source whose image is older than it or than any header, as many at a time as cargo allows jobs.
fn compile_all(root: &Path, out: &Path, archs: &str, sources: &[PathBuf], images: &[PathBuf]) {
    let nvcc = find_nvcc(root);
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize);
    let queue = Mutex::new(sources.iter().zip(images).collect::<Vec<_>>());
    let failures = Mutex::new(String::new());
    let stamp = format!("{} {archs}", nvcc.display());
    let stamp_file = out.join("archs");
    let same_targets = fs::read_to_string(&stamp_file).is_ok_and(|old| old == stamp);
    let newest_header = newest_header(&root.join("kernels"));
    thread::scope(|scope| {
        for _ in 0..jobs.min(sources.len()) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    let Some((source, image)) = next else { return };
                    let made = fs::metadata(image).and_then(|m| m.modified()).ok();
                    let changed = fs::metadata(source).and_then(|m| m.modified()).ok().max(newest_header);
                    if same_targets && made > changed {
                        continue;
                    }
                    if let Err(message) = compile(&nvcc, root, archs, source, image) {
                        let _ = fs::remove_file(image);
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push_str(&message);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failures.is_empty(), "\n{failures}");
    fs::write(stamp_file, stamp).expect("OUT_DIR is writable");
}

fn newest_header(folder: &Path) -> Option<std::time::SystemTime> {
    let newest = |entry: fs::DirEntry| match entry.path() {
        path if path.is_dir() => newest_header(&path),
        path if path.extension().is_some_and(|e| e == "cuh") => entry.metadata().and_then(|m| m.modified()).ok(),
        _ => None,
    };
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(newest).max()
}

fn compile(nvcc: &Path, root: &Path, archs: &str, source: &Path, image: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "--fatbin", "--compress-mode=size", "-Werror", "all-warnings", "-lineinfo"]);
    command.arg(format!("--frandom-seed={}", stem(root, source)));
    command.arg("-I").arg(root.join("kernels/cuda"));
    for arch in archs.split(',') {
        match arch.strip_prefix("compute_") {
            Some(number) => command.arg(format!("-gencode=arch=compute_{number},code=compute_{number}")),
            None => command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}")),
        };
    }
    command.arg("-o").arg(image).arg(source);
    let done = command.output().map_err(|e| format!("{}: {e}\n", nvcc.display()))?;
    if done.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&done.stderr).into_owned() + &String::from_utf8_lossy(&done.stdout);
    Err(format!("{}:\n{text}\n", source.display()))
}

fn find_nvcc(root: &Path) -> PathBuf {
    let named = env::var_os("CUDA_HOME").map(PathBuf::from);
    let homes = named.map_or_else(|| vec![root.join(".cuda/nvidia/cu13"), "/usr/local/cuda".into()], |home| vec![home]);
    let found = homes.iter().map(|home| home.join("bin/nvcc")).find(|nvcc| nvcc.is_file());
    found.unwrap_or_else(|| {
        let looked: Vec<_> = homes.iter().map(|home| home.display().to_string()).collect();
        panic!(
            "feature `cuda` needs nvcc 13.0, which is not in {}: run `make cuda-toolkit` or set CUDA_HOME",
            looked.join(", ")
        )
    })
}
