//! The data of `ballast top`: one look at the host and its VMs, and their past.
//!
//! Before: a daemon answers. After: `screen` has a look. Units: in the names.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use ballast_api::{Client, DecisionRecord, History, HostStat, VmStat};
use serde::Serialize;

#[derive(Clone, Debug, Default, Serialize)]
pub struct Look {
    pub at_unix_ms: u64,
    pub host: HostStat,
    pub vms: Vec<VmStat>,
}

impl Look {
    pub fn take(client: &Client) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Ok(Self { at_unix_ms: now, host: client.host()?, vms: client.vms()? })
    }
}

#[derive(Debug, Default)]
pub struct Past {
    /// The host's last hour.
    pub host: History,
    /// The last ten minutes of each VM, by name.
    pub vms: HashMap<String, History>,
}

impl Past {
    pub fn take(client: &Client) -> Result<Self> {
        let vms = client.vm_histories(10)?.into_iter().map(|vm| (vm.name, vm.history)).collect();
        Ok(Self { host: client.host_history(60)?, vms })
    }
}

#[derive(Debug, Default)]
pub struct More {
    pub history: History,
    pub decisions: Vec<DecisionRecord>,
}
