//! The demo's figures, printed as a table.

use ballast_api::{VmKind, VmStat};
use ballast_base::Bytes;
use ballast_base::units::MIB;
use comfy_table::{CellAlignment, Table, presets};

#[derive(Debug)]
pub struct VmReport {
    pub vm: String,
    pub kind: VmKind,
    pub size_bytes: u64,
    pub resident_before_bytes: u64,
    pub resident_after_bytes: u64,
    pub far_bytes: u64,
    pub ops_per_s_before: f64,
    pub ops_per_s_under: f64,
    pub ops_per_s_after: f64,
    pub faults: u64,
    /// `None` where the kernel restores.
    pub restore_us_p50: Option<f64>,
    /// `None` where the kernel restores.
    pub restore_us_p99: Option<f64>,
    pub keys: u64,
    pub keys_verified: u64,
    pub bytes_lost: u64,
}

#[derive(Debug)]
pub struct Report {
    pub vms: Vec<VmReport>,
    /// Freed memory as in the table: resident bytes before - after, minus the bytes of the store.
    pub freed_claimed_bytes: u64,
    /// Freed memory as the kernel counts it: the growth of MemAvailable and of the free pages on per-CPU lists.
    pub freed_measured_bytes: u64,
    /// Freed memory as the kernel counts it in Shmem.
    pub freed_shmem_bytes: u64,
    pub store_bytes: u64,
    /// RAM that the kernel's swap (zram) took.
    pub swap_bytes: u64,
    pub engine_kills: u64,
    pub seconds: f64,
}

/// Host memory freed between two samples, computed from the figures of the VMs.
pub fn freed(before: &[VmStat], after: &[VmStat]) -> u64 {
    let resident = |vms: &[VmStat]| vms.iter().map(|vm| vm.resident_bytes).sum::<u64>();
    let store = after.iter().map(|vm| vm.store_bytes).sum::<u64>();
    resident(before).saturating_sub(resident(after)).saturating_sub(store)
}

impl Report {
    pub fn bytes_lost(&self) -> u64 {
        self.vms.iter().map(|vm| vm.bytes_lost).sum()
    }

    pub fn print(&self) {
        let header = [
            "VM",
            "kind",
            "size\nMiB",
            "resident\nbefore MiB",
            "resident\nafter MiB",
            "far\nMiB",
            "ops/s\nbefore",
            "ops/s\nunder",
            "ops/s\nafter",
            "faults",
            "restore us\np50",
            "restore us\np99",
            "keys\nverified",
            "bytes\nlost",
        ];
        let row = |vm: &VmReport| {
            [
                vm.vm.clone(),
                vm.kind.to_string(),
                mib(vm.size_bytes),
                mib(vm.resident_before_bytes),
                mib(vm.resident_after_bytes),
                mib(vm.far_bytes),
                format!("{:.0}", vm.ops_per_s_before),
                format!("{:.0}", vm.ops_per_s_under),
                format!("{:.0}", vm.ops_per_s_after),
                vm.faults.to_string(),
                micros(vm.restore_us_p50),
                micros(vm.restore_us_p99),
                format!("{} of {}", vm.keys_verified, vm.keys),
                vm.bytes_lost.to_string(),
            ]
        };
        print_table(header, self.vms.iter().map(row));
        println!(
            "Host memory freed: {} by the table (after {} for the store and {} for zram), {} by the kernel's \
             available memory, {} by its Shmem.",
            Bytes(self.freed_claimed_bytes),
            Bytes(self.store_bytes),
            Bytes(self.swap_bytes),
            Bytes(self.freed_measured_bytes),
            Bytes(self.freed_shmem_bytes),
        );
        println!(
            "\"under\" was measured at half the memory, with the engine killed in the middle ({} kill). \
             {:.0} s in all.",
            self.engine_kills, self.seconds
        );
        println!("Where to go next: README.md for a first session of your own, `ballast doctor` for this host.");
    }
}

fn micros(value: Option<f64>) -> String {
    value.map_or("-".into(), |us| format!("{us:.1}"))
}

pub fn mib(bytes: u64) -> String {
    (bytes / MIB).to_string()
}

/// Prints a table with a row for each VM, whose first column is the name.
pub fn print_table<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("\n{table}\n");
}
