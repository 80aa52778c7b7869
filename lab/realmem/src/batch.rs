//! A program that repeats a unit of work: TPC-H, a graph, dgemm, k-means, a JVM. Its large memory is in one memfd or is
//! its own.
//!
//! Before: `scripts/real-programs.sh` has unpacked the packages of Python; a JDK is installed for the JVM. After:
//! [`Batch::run`] has the time of each unit; a drop ends the program. Threads: the program stays on one CPU; a reader
//! thread gets its lines. Units: seconds. Promise: units are equal, and a unit whose checksum is not that of the first
//! one is wrong.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_sys::program;
use ballast_testkit::program::Ends;

use crate::load::Window;
use crate::server::{LIBRARY, LIBRARY_MALLOC, Memory, command, programs};

/// Longest time until a unit ends.
const LONGEST: Duration = Duration::from_secs(600);
/// The directory of these programs has these modules, which they share.
const SHARED: [(&str, &str); 2] =
    [("unit.py", include_str!("../programs/unit.py")), ("kronecker.py", include_str!("../programs/kronecker.py"))];

/// The program that `java` runs. The others are Python's.
const JVM: &str = "jvm";
/// The collector, and the size of the heap, which realmem knows by its reservation. (An archive of classes is mapped
/// into the heap, and the file of performance data is never read.)
const JVM_OPTIONS: [&str; 6] =
    ["-Xms1600m", "-Xmx1600m", "-XX:+UseG1GC", "-XX:CompressedClassSpaceSize=64m", "-Xshare:off", "-XX:-UsePerfData"];

/// The programs by name, which `ballast bench real --help` describes.
const PROGRAMS: [(&str, &str); 9] = [
    ("tpch", include_str!("../programs/tpch.py")),
    ("graph", include_str!("../programs/graph.py")),
    ("dgemm", include_str!("../programs/dgemm.py")),
    ("kmeans", include_str!("../programs/kmeans.py")),
    ("triangles", include_str!("../programs/triangles.py")),
    ("gups", include_str!("../programs/gups.py")),
    ("lookups", include_str!("../programs/lookups.py")),
    ("liblinear", include_str!("../programs/liblinear.py")),
    (JVM, include_str!("../programs/values.java")),
];

/// A running program.
#[derive(Debug)]
pub struct Batch {
    child: Ends,
    lines: Receiver<String>,
    first: Option<String>,
    _dir: tempfile::TempDir,
}

/// Why the program of this name cannot run here, if so.
pub fn missing(name: &str) -> Option<String> {
    if name == JVM {
        return java().err().map(|error| format!("{error} (apt-get install default-jdk-headless)"));
    }
    let packages = programs().join("python");
    (!packages.join("duckdb").exists())
        .then(|| format!("there is no {}/duckdb (scripts/real-programs.sh gets it)", packages.display()))
}

/// A command that runs this text in Python.
fn python(program: &str, dir: &Path, memory: &Memory) -> Result<Command> {
    for (name, text) in SHARED.into_iter().chain([("program.py", program)]) {
        fs::write(dir.join(name), text).with_context(|| format!("Writing {name}"))?;
    }
    let python = fs::read_link(programs().join("bin/python3")).context("Reading which Python the packages are for")?;
    let mut command = command(&python, dir, memory, LIBRARY_MALLOC)?;
    command.arg("program.py").env("PYTHONPATH", programs().join("python")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("OMP_NUM_THREADS", "1").env("OPENBLAS_NUM_THREADS", "1");
    Ok(command)
}

/// A command that runs this text in a JVM.
fn jvm(program: &str, dir: &Path, memory: &Memory) -> Result<Command> {
    fs::write(dir.join("program.java"), program).context("Writing program.java")?;
    let mut command = command(&java()?, dir, memory, LIBRARY)?;
    command.args(JVM_OPTIONS).arg("program.java");
    Ok(command)
}

/// The launcher of the JDK, beside which it finds its libraries.
fn java() -> std::io::Result<PathBuf> {
    fs::canonicalize(program::find("java")?)
}

impl Batch {
    /// Starts the program of this name, and waits for its first unit. `place` gets its process id before it has touched
    /// memory.
    pub fn start(name: &str, memory: &Memory, place: impl FnOnce(u32) -> Result<()>) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("realmem-").tempdir().context("Making a directory")?;
        let (_, program) = PROGRAMS.iter().find(|(known, _)| *known == name).context("there is no such program")?;
        // Arrays come and go: what the C library's allocator holds depends on the moment.
        let memory = if matches!(memory, Memory::Private) { &Memory::Mapping } else { memory };
        let mut command =
            if name == JVM { jvm(program, dir.path(), memory)? } else { python(program, dir.path(), memory)? };
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("Starting {name}"))?;
        let out = child.stdout.take().context("the output was piped")?;
        let (send, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(out).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let mut batch = Self { child: Ends(child), lines, first: None, _dir: dir };
        place(batch.pid())?;
        batch.unit()?;
        Ok(batch)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Waits for the units that end in this time, and for the one under way then.
    pub fn run(&mut self, time: Duration) -> Result<Window> {
        let mut window = Window::default();
        let start = Instant::now();
        let (mut seconds, mut units) = (0.0, 0);
        while units == 0 || start.elapsed() < time {
            let (took, is_right) = self.unit()?;
            seconds += took;
            units += 1;
            window.wrong += u64::from(!is_right);
        }
        window.per_s = f64::from(units) / seconds;
        Ok(window)
    }

    /// The seconds of the next unit, and whether its checksum is right.
    fn unit(&mut self) -> Result<(f64, bool)> {
        let line = match self.lines.recv_timeout(LONGEST) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => bail!("the program did no unit of work in {} s", LONGEST.as_secs()),
            Err(RecvTimeoutError::Disconnected) => bail!("the program ended ({:?})", self.child.0.wait()),
        };
        let mut words = line.split(' ').skip(1);
        let took = words.next().and_then(|word| word.parse().ok());
        let (Some(took), Some(checksum)) = (took, words.next()) else { bail!("the program wrote {line:?}") };
        let first = self.first.get_or_insert_with(|| checksum.to_owned());
        Ok((took, first == checksum))
    }
}
